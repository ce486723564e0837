"""Prices and carbon that depend on the time: of devices, of electricity, and the grams of CO2 of a kWh.

The planner then decides when jobs run, too: within their deadlines they wait for cheap hours, pause, and go on.
"""

OBJECTIVES = {
    "cost": "ringmaster.features.tariffs.tariff_objectives:Cost",
    "emissions": "ringmaster.features.tariffs.tariff_objectives:Emissions",
    "trade-off": "ringmaster.features.tariffs.tariff_objectives:TradeOffObjective",
}
