"""The errors of this package that others may want to tell apart."""


class Refusal(ValueError):
    """A private run that cannot be made, or not as it was asked for. Nothing was spent.

    Attributes:
        code: Names the reason, such as "repeated-rows", and stays the same when the words of the message change.

    Example:
        >>> raise Refusal("repeated-rows", "train_dataset contains the same row more than once.")
        Traceback (most recent call last):
        doppler_hf.errors.Refusal: train_dataset contains the same row more than once.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)  # both, so that one process can send it to another
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])
