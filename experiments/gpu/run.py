"""Everything that needs a GPU, in under nine minutes: `make gpu`, or

    PYTHONPATH=src python -m experiments.gpu.run [--parts kernels,serving] [--budget 540] [--json results.json]

Wants torch, triton, numpy, transformers, safetensors and pytest, and nothing else. On a machine without a GPU a
reduced form runs in Triton's interpreter, which shows that it works and nothing about speed. Prints a table and, as
the last line, the same as JSON; exit status 1 unless all that was asked for ran and held.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = {"kernels": 200.0, "attention": 120.0, "parity": 90.0, "serving": 120.0}  # the most that each may take
PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "pytest")
INTERPRETED = "cpu (interpreted)"


def main() -> int:
    begin = time.monotonic()
    options = _options()
    if options.rows:
        return _run_here(options)
    machine = _machine()
    device = machine.get("gpu", INTERPRETED)
    parts: dict[str, dict[str, Any]] = {}
    for name in options.parts:
        left = options.budget - (time.monotonic() - begin)
        if left < SECONDS[name]:
            reason = f"may take {SECONDS[name]:.0f} s, and {max(left, 0.0):.0f} s are left"
            parts[name] = {"status": "skipped", "seconds": 0.0, "error": reason, "rows": []}
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        parts[name] = _run_part(name, options.select, interpreted=device == INTERPRETED)
    report = {
        "device": device,
        "reduced": device == INTERPRETED,
        "ok": all(part["status"] == "ok" for part in parts.values()),
        "seconds": round(time.monotonic() - begin, 1),
        "machine": machine,
        "parts": parts,
    }
    print(f"{_table(report)}\n\n{json.dumps(report)}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["ok"] else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(SECONDS), help="some of %(default)s")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all; parts beyond it are skipped")
    parser.add_argument("--select", help="kernel tests to run, as pytest's -k takes it")
    parser.add_argument("--json", type=Path, help="a file that the JSON goes to as well")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # in a part's process: where its rows go
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    unknown = set(options.parts) - set(SECONDS)
    if unknown:
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; known: {', '.join(SECONDS)}")
    return options


def _machine() -> dict[str, Any]:
    """What it runs on, and with which versions."""
    found: dict[str, Any] = {"python": platform.python_version(), "cpu_cores": os.cpu_count()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    try:
        import torch
    except ImportError as error:
        sys.exit(f"{sys.executable}: {error}; name a Python that has torch: make gpu PYTHON=...")
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": gpu.name, "memory_bytes": gpu.total_memory, "cuda": torch.version.cuda}
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
            found["driver"] = answer.splitlines()[0].strip()
    return found


def _run_part(name: str, select: str | None, *, interpreted: bool) -> dict[str, Any]:
    """Run a part in a process of its own: one that hangs is stopped, and a fault on the GPU ends with it."""
    begin = time.monotonic()
    error = None
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rows"
        file.touch()
        command = [sys.executable, "-m", "experiments.gpu.run", "--parts", name, "--rows", str(file)]
        command += ["--select", select] if select else []
        # Triton reads it when it is imported, and so do the tests' settings.
        environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted))}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=2, start_new_session=True)
        try:
            ended = process.wait(SECONDS[name])
            error = f"ended with status {ended}" if ended else None
        except subprocess.TimeoutExpired:
            error = f"stopped after {SECONDS[name]:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    if rows and "error" in rows[-1]:
        error = rows.pop()["error"]
    held = bool(rows) and all(row["ok"] for row in rows)
    status = "ok" if held and error is None else "failed"
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), "error": error, "rows": rows}


def _run_here(options: argparse.Namespace) -> int:
    """Be a part: write its rows, each as soon as it is there."""
    with options.rows.open("w") as file:

        def write(row: dict[str, Any]) -> None:
            print(json.dumps(row), file=file, flush=True)

        try:
            from experiments.gpu.parts import PARTS
            from experiments.gpu.sizes import choose

            for row in PARTS[options.parts[0]](choose(options.select)):
                write(asdict(row))
        except Exception as error:
            traceback.print_exc()
            write({"error": f"{type(error).__name__}: {error}"[:500]})
            return 1
    return 0


def _table(report: dict[str, Any]) -> str:
    machine = report["machine"]
    where = f"{report['device']}, "
    if report["reduced"]:
        where = "reduced form, kernels interpreted on a CPU: it shows that all works, and nothing about speed; "
    else:
        where += f"{machine['memory_bytes'] / 2**30:.0f} GiB, driver {machine.get('driver', 'unknown')}, "
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", *PACKAGES) if name in machine)
    lines = [
        f"make gpu: {where}{versions}; {report['seconds']:.0f} s",
        "",
        "| part | what | result |",
        "|---|---|---|",
    ]
    for name, part in report["parts"].items():
        notes = [part["status"].upper() if part["status"] != "ok" else "ok", f"{part['seconds']:.0f} s"]
        lines.append(_line(name, "", ", ".join([*notes, *filter(None, [part["error"]])])))
        lines += [
            _line(name, row["case"], ("" if row["ok"] else "FAILED: ") + row["result"]) for row in part["rows"]
        ]
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
