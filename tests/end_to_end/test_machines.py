"""Two machines train as one: two network namespaces, joined by a virtual cable, each started by its own `accelerate launch`.

It needs root, the command `ip` and network namespaces of the kernel, and is skipped where one of them is missing.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger

CONFIG = Path(__file__).parents[2] / "recipes" / "accelerate" / "ddp.yaml"
RANKS = (0, 1)


def ip(*words):
    return subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, timeout=20)


@pytest.fixture
def machines():
    """The namespaces, and the cable's end in each."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("Two machines need root and the command ip.")
    names, ends = ([f"{kind}{os.getpid()}-{rank}" for rank in RANKS] for kind in ("m", "v"))
    with contextlib.ExitStack() as cleaning:
        for name in names:
            if (made := ip("netns", "add", name)).returncode:
                pytest.skip(f"Two machines need network namespaces: {made.stderr.strip()}")
            cleaning.callback(ip, "netns", "delete", name)
        if (
            made := ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        ).returncode:
            pytest.skip(f"Two machines need a virtual cable: {made.stderr.strip()}")
        for rank in RANKS:
            for words in (
                ("addr", "add", f"10.77.0.{1 + rank}/24", "dev", ends[rank]),
                ("link", "set", ends[rank], "up"),
                ("link", "set", "lo", "up"),
            ):
                assert ip("-n", names[rank], *words).returncode == 0
        yield [*zip(names, ends, strict=True)]


def launched(machine, rank, folder):
    name, end = machine
    words = [
        f"--config_file={CONFIG}", "--num_machines=2", "--num_processes=2",
        f"--machine_rank={rank}", "--main_process_ip=10.77.0.1",
        "--main_process_port=29500", "--mixed_precision=no", "--dynamo_backend=no", "--rdzv_backend=static",
    ]  # fmt: skip
    launch = [sys.executable, "-m", "accelerate.commands.launch", *words, __file__, str(folder)]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *launch],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_two_machines_make_one_private_run(machines, tmp_path):
    # Each has no way to the other but the cable.
    folders = [tmp_path / str(rank) for rank in RANKS]
    for folder in folders:
        folder.mkdir()
    started = [launched(machine, rank, folder) for rank, (machine, folder) in enumerate(zip(machines, folders, strict=True))]
    try:
        outs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(out[-3000:] for out in outs)
    found = [(folder / "found").read_text().split() for folder in folders]
    assert found[0][0] == found[1][0] == "2"  # processes
    assert found[0][1] != found[1][1]  # network namespaces
    assert found[0][2] == found[1][2]  # weights
    ledger = PrivacyLedger.load(folders[0] / "out" / LEDGER_NAME)
    assert (ledger.private, ledger.steps_run, ledger.statement.expected_batch_size) == (True, 4, 16)


def train(folder):
    from doppler_hf.run.parameters import parameters_digest
    from tests.support.trainers import checked_trainer_of

    trainer = checked_trainer_of(folder)
    trainer.train()
    facts = (trainer.args.world_size, Path("/proc/self/ns/net").readlink().name, parameters_digest(trainer.model))
    (folder / "found").write_text(" ".join(map(str, facts)))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
