"""Jobs that are described by Ludwig configurations, and the models that these train: of tables of features."""

DATA_SOURCES = {"features": "ringmaster.features.ludwig.feature_rows:FeatureRows"}
FORMER_MODULES = {"ringmaster.techniques.models.feature_model": "ringmaster.features.ludwig.feature_model"}
