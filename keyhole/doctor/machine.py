"""What the machine can do: processors, precision, memory, disk. Rates are measured here and now."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from keyhole.core.findings import Finding
from keyhole.doctor.packages import install

LEAST_FREE = 1.0
"""Gigabytes below which a run may not be able to save."""


def examine_machine() -> list[Finding]:
    """Findings on torch at work, and on disk and cache."""
    return [*_torch(), _disk(Path.cwd()), _cache()]


def _torch() -> list[Finding]:
    try:
        import torch

        from keyhole.training.precision import choose_precision, keep_freed_memory, matrix_rates
    except Exception as error:  # a broken build raises whatever its loader does
        first = (str(error).splitlines() or [""])[0]
        return [
            Finding(
                statement="torch can be imported",
                expected="yes",
                measured=f"{type(error).__name__}: {first}",
                verdict="fails",
                remedy=install("torch==2.13.*"),
            )
        ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = (torch.float32, torch.bfloat16)
    found = matrix_rates(dtypes, 512)
    rates = {str(d).removeprefix("torch."): rate / 1e9 for d, rate in zip(dtypes, found, strict=True)}
    chosen = choose_precision("auto", device)
    return [
        _threads(torch.get_num_threads()),
        Finding(
            statement="device",
            expected="cpu or cuda",
            measured=torch.cuda.get_device_name() if device == "cuda" else f"cpu, {_capability(torch)}",
            verdict="holds",
        ),
        Finding(
            statement="precision",
            expected="the faster of float32 and bfloat16",
            measured=f"{chosen.name}: {chosen.reason}",
            verdict="holds",
            why='train.precision = "auto" computes in it; weights stay in float32',
        ),
        Finding(
            statement="matrix products",
            expected="above 1 GFLOP/s",
            measured=", ".join(f"{name} {rate:,.0f} GFLOP/s" for name, rate in rates.items()),
            verdict="holds" if max(rates.values()) > 1 else "fails",
            why="512 x 512 on the processor, the best of a few",
            evidence=rates,
        ),
        _memory(keep_freed_memory()),
    ]


def _capability(torch: object) -> str:
    return torch.backends.cpu.get_cpu_capability()  # type: ignore[attr-defined]


def _threads(threads: int) -> Finding:
    allowed = getattr(os, "sched_getaffinity", None)
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    fine = threads <= cores
    return Finding(
        statement="threads",
        expected=f"at most {cores}, one for each core",
        measured=f"{threads} of {cores} cores",
        verdict="holds" if fine else "fails",
        why="more threads than cores wait for each other",
        remedy="" if fine else f"export OMP_NUM_THREADS={cores}",
    )


def _memory(kept: bool) -> Finding:
    return Finding(
        statement="freed memory",
        expected="kept for the next step",
        measured="kept" if kept else "given back after each step",
        verdict="holds" if kept else "undecided",
        why="10-20 % of a step is page faults otherwise; only glibc can be told",
        remedy="" if kept else "run on a Linux with glibc to train faster; everything works without",
    )


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free / 1e9
    fine = free >= LEAST_FREE
    return Finding(
        statement="disk",
        expected=f"at least {LEAST_FREE:.0f} GB free",
        measured=f"{free:,.1f} GB free in {folder}",
        verdict="holds" if fine else "fails",
        why="a checkpoint is written beside the last good one before that is removed",
        remedy="" if fine else "remove runs you no longer need (du -sh runs/*), or give --out a folder on another disk",
    )


def _cache() -> Finding:
    """Whether token files can be kept: tried, since permissions alone do not tell."""
    try:
        from keyhole.text.tokens import cache_folder
    except Exception as error:  # numpy or tokenizers is missing or broken, which is a finding of its own
        return Finding(
            statement="cache",
            expected="writable",
            measured=f"{type(error).__name__}: {error}",
            verdict="undecided",
            remedy="mend the packages above first",
        )
    folder, reason = cache_folder(), ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"keyhole")
    except OSError as error:
        reason = error.strerror or str(error)
    return Finding(
        statement="cache",
        expected="a folder that can be written",
        measured=f"{folder} {f'cannot be written: {reason}' if reason else 'can be written'}",
        verdict="fails" if reason else "holds",
        why="encoded text is kept there; without it every run encodes its text again",
        remedy="export KEYHOLE_CACHE=/a/folder/you/may/write" if reason else "",
    )
