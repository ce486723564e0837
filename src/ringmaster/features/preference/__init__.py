"""Preference learning: losses of chosen and rejected answers, of desirable ones, and of reward models; their data."""

LOSSES = {
    "dpo": "ringmaster.features.preference.preference_losses:Dpo",
    "orpo": "ringmaster.features.preference.preference_losses:Orpo",
    "simpo": "ringmaster.features.preference.preference_losses:Simpo",
    "kto": "ringmaster.features.preference.kto:Kto",
    "bradley-terry": "ringmaster.features.preference.preference_losses:BradleyTerry",
}
METRICS = {
    "preference_accuracy": "ringmaster.features.preference.preference_metrics:PreferenceAccuracy",
    "reward_accuracy": "ringmaster.features.preference.preference_metrics:RewardAccuracy",
}
DATA_SOURCES = {
    "preference": "ringmaster.features.preference.preference_rows:Preference",
    "unpaired-preference": "ringmaster.features.preference.preference_rows:UnpairedPreference",
    "comparison": "ringmaster.features.preference.preference_rows:Comparison",
}
