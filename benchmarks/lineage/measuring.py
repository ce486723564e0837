"""What the benchmarks of lineage share: how often they measure, the goal for rates, and when and where they ran."""

import os
import platform
from datetime import date

GOAL_MB_S = 500
ROUNDS = 3


def machine():
    return {"cores": os.cpu_count(), "cpu": platform.machine(), "load_1min": round(os.getloadavg()[0], 1)}


def stamp():
    told = machine()
    return (
        f"{date.today().isoformat()}, {told['cores']} cores, {told['cpu']}, a load of {told['load_1min']} at the end."
    )
