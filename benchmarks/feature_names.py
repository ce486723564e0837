"""Counts the files outside of a feature's own package that name the feature: how far it is spread over the core.

    python -m benchmarks.feature_names [FEATURE]

With a feature, prints its files. A file counts if an identifier, a text or a comment of it matches the feature's
pattern. The patterns leave out other meanings of the words, such as `tensor.clone()`. What defines division, seeds
and sums, limits of the planning problem, and fused groups are not packages of their own, but are counted too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.code_size import ROOT, SHIPPED, tracked

FEATURES = "src/ringmaster/features"
PATTERNS: Mapping[str, str] = {
    "fused_groups": r"training\.fused|FusedGroup|shared_base|SharedBase|fused.groups?\b|planning\.fusion"
    r"|group_layouts|group_search",
    "external_trainers": r"model\.command|[\"']command[\"']\)|techniques\.(?:external|command)"
    r"|(?:model|spec)\.adopt\b|[\"']adopt[\"']|a command's (?:model|own)|words of a command|external_trainers",
    "quotas": r"(?i)quota",
    "exact": r"is_exact|\.exact\b|exact_chunk|exact_sums|why_not_exact|[\"']exact[\"']",
    "stores": r"(?i)is_store\b|StoreSettings|knowledge.?stores?\b|store_builder|passage_encoder|kind store",
    "untrusted": r"(?i)untrusted(?! folder)|referee|verify_share|verify_steps",
    "target": r"target_scheduler|TargetScheduler|features\.target|may_vary|(?<!_)variants\(|search_steps|Phases\("
    r"|(?i:time.to.target)|\bREACHED\b|noise_scale|GradientNoise|(?<!_)searches\(|\.varies\b|TrainingPhase",
    "warm_start": r"(?i)warm.?start",
    "clones": r"(?<!\.)\bclone(?!\()|[Cc]lone[ds]\b|Clone|CLONE|(?<!\.)\bclone_",
    "quantized_base": r"(?i)quantize_base|quantized_?base|base_format|\bnf4|(?<!\d)4.bits?\b",
    "kernels": r"(?i)numerics|features\.kernels",
    "local_updates": r"(?i)local.updates?\b|exchange_every|exchanges_a_step|sync_every|(?:job|spec|part)\.num_workers"
    r"|\.synchronous\b|exchanging[(,]",
    "composition": r"\bComposition|composite|COMPOSED|EXTRACTED|shared.components?|named_components",
    "chain": r"\.chain import|checkpoints\.chain|StateChain|ChainWriter|state_chain|chain of (?:its |the )?states"
    r"|digested_steps",
    "ludwig": r"(?i)ludwig",
}
"""What names each feature."""
OTHER_MEANINGS: Mapping[str, tuple[str, ...]] = {
    # what is to be done about a flow run; a method of Typer's applications
    "external_trainers": ("flows/pool/batch_worker.py", "src/ringmaster/feature_hooks.py"),
    # of a container's cores, and of a disk
    "quotas": ("tasks/cluster.py", "techniques/checkpoints/saving.py", "techniques/processes/failures.py"),
    # a vertex at which a walk through the lineage arrives
    "target": ("model_lineage/model_pages.py",),
    # retraining from the champion's weights, by the base of a job
    "warm_start": ("flows/retraining/select_models.py", "tasks/retraining/production.py"),
    # images with transparency; tensors that two stored models have in common
    "composition": (
        "techniques/data/images.py",
        "model_lineage/ledger/ledger.py",
        "model_lineage/tensors/comparison.py",
    ),
    # models whose weights are quantized after they were trained, or that learn with it
    "quantized_base": (
        f"{FEATURES}/quantization_aware/__init__.py",
        f"{FEATURES}/quantization_aware/batch.py",
        f"{FEATURES}/quantization_aware/trainer.py",
        "tasks/batch/parent_rules.py",
        "techniques/job.py",
        "techniques/models/export.py",
        "techniques/models/quantization.py",
    ),
}
"""The files in which a pattern matches words of another meaning only."""
HOMES: Mapping[str, str] = {"chain": f"{FEATURES}/untrusted", "fused_groups": "techniques/training/fused"}
"""The packages of features that have none of the same name among the features."""


def main() -> None:
    """Prints the counts, or the files of one feature."""
    found = files_naming(ROOT)
    for feature in sys.argv[1:]:
        print(*found[feature], sep="\n")
    if not sys.argv[1:]:
        for feature, files in found.items():
            print(f"{len(files):>4}  {feature}")
        print(f"{sum(map(len, found.values())):>4}  together")


def files_naming(root: Path) -> Mapping[str, list[str]]:
    """Returns the shipped files outside of each feature's package that name the feature; not the list of features."""
    files = [file for file in tracked(root, SHIPPED, suffix=".py") if file != f"{FEATURES}/__init__.py"]
    texts = {file: (root / file).read_text() for file in files}
    return {
        feature: [
            file
            for file, text in texts.items()
            if not file.startswith(f"{HOMES.get(feature, f'{FEATURES}/{feature}')}/")
            and file not in OTHER_MEANINGS.get(feature, ())
            if re.search(pattern, text)
        ]
        for feature, pattern in PATTERNS.items()
    }


if __name__ == "__main__":
    main()
