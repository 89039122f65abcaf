"""What a command has printed, for tests of its words."""


def flat(text):
    return " ".join(text.split())
