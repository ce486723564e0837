"""Adaptations: students that learn from teachers, models whose pruned weights stay zero, and models without steps."""

TECHNIQUES = {"rewrite": "ringmaster.features.adaptation.rewrite:Rewrite"}
FORMER_TECHNIQUES = {"ringmaster.techniques.rewrite:Rewrite": TECHNIQUES["rewrite"]}
