"""Cases that several processes compute together, each in a file's own function."""

import os
import subprocess
import sys

import torch


def launch(file, folder, processes, *cases, timeout=300):
    """Return by case what each process has found; the file must call `main` with its cases."""
    done = started(file, folder, processes, *cases, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return {case: [load(folder, case, processes, rank) for rank in range(processes)] for case in cases}


def started(file, folder, processes, *cases, timeout=300):
    """Return how a program of several processes has ended."""
    return subprocess.run(
        [sys.executable, file, str(processes), str(folder), *cases],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def load(folder, case, processes, rank):
    return torch.load(folder / f"{case}-{processes}-{rank}.pt", weights_only=False)


def rendezvous(processes):
    """Return a store on any free port, and the environment of processes that meet there."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {
        "MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
    }  # fmt: skip


def main(functions):
    """Do what torchrun does, in forks of a process that has imported everything already."""
    processes, folder, cases = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    _store, environment = rendezvous(processes)  # open until all have ended
    os.environ |= environment
    torch.multiprocessing.start_processes(
        do_all, args=(functions, folder, processes, cases), nprocs=processes, start_method="fork"
    )


def do_all(rank, functions, folder, processes, cases):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for case in cases:
        torch.save(functions[case](folder, processes), f"{folder}/{case}-{processes}-{rank}.pt")
