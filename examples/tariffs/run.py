"""Trains two jobs when that is cheap: `python examples/tariffs/run.py`, two to four minutes on CPU slots.

Its hours take ten seconds each, and are written into a CSV file when it starts: dear ones first, then cheap ones.
"""

import json
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ringmaster import Batch, DataSpec, Job, ModelSpec, train_batch

HOUR = timedelta(seconds=10)
PRICES = ([0.40] * 7 + [0.08] * 6) * 6  # of a device-hour
CARBON = ([450.0] * 7 + [120.0] * 6) * 6  # grams of CO2e of a kWh


def write(file: Path, values: list[float], begins: datetime) -> None:
    """Writes values that begin then, one an hour."""
    rows = [f"{(begins + k * HOUR).isoformat()},{value}" for k, value in enumerate(values)]
    file.write_text("\n".join(["time,value", *rows]) + "\n")


def main() -> None:
    """Trains the batch, and prints what it has spent, beside the plan."""
    model = ModelSpec(architecture="GPT2LMHeadModel", config={"n_embd": 32, "n_layer": 2, "n_head": 2})
    data = DataSpec(source="python-stdlib", seq_len=32, vocab_size=512)
    jobs = [Job(name=name, model=model, data=data, num_steps=100) for name in ("first", "second")]
    with tempfile.TemporaryDirectory() as folder:
        begins = datetime.now(UTC)
        write(Path(folder, "prices.csv"), PRICES, begins)
        write(Path(folder, "carbon.csv"), CARBON, begins)
        batch = Batch.of(
            name="cheap-hours",
            jobs=jobs,
            objective="trade-off",
            trade_off={"money": 1.0, "hour": 0.01},  # of windows of equal price, the next one
            folder=Path(folder),
            deadlines_s={job.name: 600.0 for job in jobs},
            price="prices.csv",
            carbon="carbon.csv",
            power_w=65.0,
        )
        result = train_batch(batch)
    json.dump(result.to_json()["spending"], sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
