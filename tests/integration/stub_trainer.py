"""A trainer without any library: its model is a number that each step adds to. kwargs select its misbehaviour."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ORDER = json.loads(Path(os.environ["RINGMASTER_ORDER"]).read_text())
HOW = ORDER["job"]["model"]["kwargs"].get("how", "well")
STEP_S = 0.01
told_to_end = False


def say(event, **details):
    with Path(os.environ["RINGMASTER_REPORT"]).open("a") as report:
        report.write(json.dumps({"event": event, **details}) + "\n")


def end_soon(*_):
    global told_to_end
    told_to_end = True


def save(step, model):
    folder = Path(ORDER["save_to"]) / str(step)
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "model.json").write_text(json.dumps(model))
    say("checkpoint", step=step, folder=str(folder), seconds=0.5)


def finish(step, model):
    say("metrics", step=step, metrics={"loss": 1.0 / model, "total": model}, seconds=0.25)
    (Path(ORDER["export_to"]) / "model.json").write_text(json.dumps(model))
    say("model", seconds=0.125)


def misbehave(step):
    match HOW:
        case "memory":
            say("failed", kind="out_of_memory", message="the device is full")
            sys.exit(3)
        case "mistaken":
            say("failed", kind="invalid", message="width 3 is not a power of two")
            sys.exit(3)
        case "dies" if step == 3:
            print("cannot continue", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "babbles":
            say("tick")
        case "skips":
            say("step", step=step + 2, seconds=STEP_S, loss=1.0)
        case "diverges" if step == 2:
            say("step", step=step + 1, seconds=STEP_S, loss=float("nan"))
        case "leaves" if step == 2:
            sys.exit(0)
        case "lies":
            say("done", step=step)
            sys.exit(0)
        case "spawns" if step == 1:
            # As torchrun does: in its own session, which no signal to the process group reaches.
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            pids = Path(ORDER["job"]["model"]["kwargs"]["pids"])
            aside = pids.with_name("pids-aside")  # renamed when complete, so that readers never see a part of it
            aside.write_text(f"{os.getpid()} {child.pid}")
            aside.rename(pids)


def main():
    if HOW == "mute":
        return
    if HOW == "mistyped":
        raise KeyError(HOW)
    if HOW == "offline":
        raise OSError(HOW)
    if HOW == "sleeps":  # before the signal handler is installed
        say("beat")
        time.sleep(600)
    signal.signal(signal.SIGTERM, end_soon)
    step, model = ORDER["first_step"], 0
    if ORDER["restore_from"]:
        model = json.loads((Path(ORDER["restore_from"]) / "deep" / "model.json").read_text())
    say("start", step=step)
    last = ORDER["last_step"] if ORDER["mode"] == "run" else sys.maxsize
    while step < last and not told_to_end:
        misbehave(step)
        time.sleep(STEP_S)  # simulates work
        step, model = step + 1, model + step
        say("step", step=step, seconds=STEP_S, loss=1.0 / step)
        if HOW == "saves" and step % 2 == 0:
            save(step, model)
    if HOW != "saves" or step % 2:
        save(step, model)
    if ORDER["mode"] == "profile":
        say("memory", peak_bytes=12345678)
    if ORDER["mode"] == "profile" or step == ORDER["num_steps"]:
        if HOW != "silent":
            finish(step, model)
        say("done", step=step)
    elif step == last:
        say("done", step=step)
    elif HOW != "wordless":
        say("preempted", step=step)
    sys.exit(75 if told_to_end and ORDER["mode"] == "run" and step < last else 0)


main()
