"""The process that runtime/telemetry.py feeds: JSON lines on stdin go to W&B.

    python -P runtime/wandb_mirror.py MODE RUN_DIR PARENT_PID FINISH_S

    first line    {"config": ..., "name": ...}
    rows          {"train/step": 1, "train/loss": 2.5, ...}
    last line     {"exit_code": 0}; without it the run was cut short and W&B calls it failed

What goes wrong is one line on stdout and exit code 1. It may hang for as long as it likes: the parent kills it, and if
the parent is gone, a thread does. It imports nothing of Millrace and is imported by nothing.
"""
import json
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path


def kill_when_orphaned(parent: int, finish_s: float) -> None:
    """Ends this process some seconds after its parent, in whatever call the other thread hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(finish_s)
    os.kill(os.getpid(), signal.SIGKILL)


def start_run(mode: str, run_dir: Path, config: dict, name: str):
    """A W&B run. Online, attempts of one run directory are one W&B run; offline each is its own, in one group (its files
    would overwrite each other's rows when they are synced)."""
    os.environ.update(WANDB_MODE=mode, WANDB_SILENT="true", WANDB_CONSOLE="off", WANDB_ERROR_REPORTING="false",
                      WANDB_DISABLE_CODE="true", WANDB_X_DISABLE_STATS="true")
    os.environ.setdefault("WANDB_PROJECT", "millrace")
    import wandb
    which = {"group": name}
    if mode == "online":
        id_file = run_dir / "wandb" / "run_id"
        id_file.parent.mkdir(parents=True, exist_ok=True)
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        which = {"id": id_file.read_text().strip(), "resume": "allow"}
    run = wandb.init(dir=str(run_dir), mode=mode, config=config, name=name, **which)
    # an axis of our own: W&B's own step must only rise, and a resumed run logs some steps again
    run.define_metric("train/step")
    run.define_metric("*", step_metric="train/step")
    return run


def main() -> None:
    mode, run_dir, parent, finish_s = sys.argv[1:]
    # what W&B or its children print goes where stderr goes; only the one line goes to the parent
    report = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=kill_when_orphaned, args=(int(parent), float(finish_s)), daemon=True).start()
    doing = "start"
    try:
        run = start_run(mode, Path(run_dir), **json.loads(sys.stdin.readline()))
        exit_code = 1
        for line in sys.stdin:
            row = json.loads(line)
            if "exit_code" in row:
                exit_code = row["exit_code"]
                break
            doing = f"take step {row['train/step']}"
            run.log({key: value for key, value in row.items() if isinstance(value, (int, float, str))})
        doing = "finish"
        run.finish(exit_code=exit_code)
    # SystemExit too: whoever leaves from inside W&B would be taken for one who finished
    except BaseException as error:
        why = "it is not installed" if isinstance(error, ModuleNotFoundError) and error.name == "wandb" else \
            f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
        os.write(report, f"could not {doing}: {why}\n".encode())
        # no atexit hooks: those of a service that just failed may hang
        os._exit(1)


if __name__ == "__main__":
    main()
