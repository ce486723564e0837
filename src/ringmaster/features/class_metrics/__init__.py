"""Metrics of classes beyond accuracy: precision, recall, F1, the Matthews coefficient and AUROC."""

METRICS = {
    "f1": "ringmaster.features.class_metrics.class_counts:F1",
    "f1_macro": "ringmaster.features.class_metrics.class_counts:F1Macro",
    "f1_micro": "ringmaster.features.class_metrics.class_counts:F1Micro",
    "f1_weighted": "ringmaster.features.class_metrics.class_counts:F1Weighted",
    "precision": "ringmaster.features.class_metrics.class_counts:Precision",
    "recall": "ringmaster.features.class_metrics.class_counts:Recall",
    "matthews": "ringmaster.features.class_metrics.class_counts:Matthews",
    "auroc": "ringmaster.features.class_metrics.class_counts:Auroc",
}
