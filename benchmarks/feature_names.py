"""Counts the files outside of a feature's own package that name the feature: how far it is spread over the core.

    python -m benchmarks.feature_names [FEATURE]

With a feature, prints its files. A file counts if an identifier, a text or a comment of it matches the feature's
pattern. The patterns leave out other meanings of the words, such as `tensor.clone()`. What defines division, seeds
and sums, limits of the planning problem, and fused groups are no packages of their own, but are counted too.
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
    "external_trainers": r"model\.command|has_command|techniques\.external|techniques\.command|(?:model|spec)\.adopt\b"
    r"|[\"']adopt[\"']|of a command\b|a command's|external_trainers",
    "quotas": r"(?i)quota",
    "exact": r"is_exact|\.exact\b|exact_chunk|exact_sums|why_not_exact|[\"']exact[\"']",
    "stores": r"(?i)is_store\b|StoreSettings|knowledge.?stores?\b|store_builder|passage_encoder|kind store|made_by",
    "untrusted": r"(?i)untrusted|referee|verify_share|verify_steps",
    "target": r"target_scheduler|TargetScheduler|features\.target|may_vary|variants\(|search_steps|Phases\b"
    r"|(?i:time.to.target)|REACHED|noise_scale|GradientNoise|searches\(|\bvaries\b|TrainingPhase",
    "warm_start": r"(?i)warm.?start|started_from|FirstCheckpoint",
    "clones": r"(?<!\.)\bclone(?!\()|[Cc]lone[ds]\b|Clone|CLONE|clone_",
    "quantized_base": r"(?i)quantize_base|quantized_?base|base_format|\bnf4|4.bits?\b",
    "kernels": r"(?i)numerics|features\.kernels",
    "local_updates": r"(?i)local.updates?\b|exchange_every|exchanges_a_step|sync_every|(?:job|spec|part)\.num_workers"
    r"|\.synchronous\b|exchanging",
    "composition": r"\bComposition|composite|COMPOSED|EXTRACTED|shared.components?|named_components",
    "chain": r"checkpoints\.chain|StateChain|ChainWriter|state_chain|chain of (?:its |the )?states|digested_steps",
    "ludwig": r"(?i)ludwig",
}
"""What names each feature."""


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
    """Returns the shipped files outside of each feature's package that name the feature."""
    texts = {file: (root / file).read_text() for file in tracked(root, SHIPPED, suffix=".py")}
    return {
        feature: [
            file
            for file, text in texts.items()
            if not file.startswith(f"{FEATURES}/{feature}/") and re.search(pattern, text)
        ]
        for feature, pattern in PATTERNS.items()
    }


if __name__ == "__main__":
    main()
