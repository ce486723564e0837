"""Small lineages for tests, each written in a few lines."""

from ringmaster.model_lineage import DatasetInput, ModelRecord, Origin
from ringmaster.model_lineage.snapshot import LineageNode, Snapshot


def data(name, digest=None, context="training"):
    return DatasetInput(name=name, digest=digest or f"digest-of-{name}", source=f"/data/{name}", context=context)


def node(name, *parents, kind=None, aliases=(), datasets=(), version=1, metrics=None, **record):
    """A node with id m-NAME, or m-NAME-VERSION for later versions. Parents are given by name."""
    suffix = "" if version in (1, None) else f"-{version}"
    kind = kind or ("fine-tuned" if parents else "pretrained")
    return LineageNode(
        record=ModelRecord(
            model_id=f"m-{name}{suffix}",
            registered_name=name,
            version=version,
            uri=f"models:/{name}/{version}",
            kind=kind,
            parents=tuple(f"m-{parent}" for parent in parents),
            datasets=tuple(datasets),
            run_id=f"run-{name}",
            experiment_id="1",
            **{"origin": Origin(), **record},
        ),
        aliases=tuple(aliases),
        metrics=metrics or {},
    )


def snapshot(*nodes):
    return Snapshot(nodes)


def shop():
    """base -> clean -> product (champion) -> small; base -> poisoned; clean, poisoned -> merged (challenger)."""
    return snapshot(
        node("base", datasets=[data("web")]),
        node("clean", "base", datasets=[data("reviews")]),
        node("poisoned", "base", datasets=[data("spam"), data("reviews", context="evaluation")]),
        node("product", "clean", aliases=["champion"]),
        node("small", "product", kind="distilled"),
        node("merged", "poisoned", "clean", kind="merged", aliases=["challenger"]),
    )
