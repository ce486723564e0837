"""`adaptation` of a job: how its model is derived from others."""

from ringmaster.techniques.job import AdaptationSpec

JOB_FEATURES = (AdaptationSpec,)
