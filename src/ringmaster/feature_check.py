"""The check of all features before anything starts: what is wrong with those of installed distributions.

No feature replaces another one silently, nor anything of Ringmaster. Built-in features are checked by the tests.
"""

from collections.abc import Iterator
from functools import cache

from ringmaster import features
from ringmaster.errors import InputError
from ringmaster.feature_hooks import HOOKS, OF_PACKAGES, OF_PROCESSES, examined, layout_faults
from ringmaster.features import FeaturePackage
from ringmaster.findings import Finding
from ringmaster.registry import installed_entries, resolve

OWN = FeaturePackage("Ringmaster itself")


@cache
def feature_findings() -> tuple[Finding, ...]:
    """Returns the faults of the features of installed distributions, and the names that two features take.

    Their modules for training are imported, and checked, where a job is tried before it starts.
    """
    installed = features.installed_packages()
    kinds = [kind for kind in HOOKS if kind != OF_PROCESSES] if installed else []
    faults = [fault for package in installed for fault in layout_faults(package)]
    faults += [fault for package in installed for kind in kinds for fault in examined(package, kind)[1]]
    return tuple(dict.fromkeys([*faults, *_clashes(kinds), *_entry_point_clashes()]))


def refuse_faulty_features() -> None:
    """Raises InputError with all faults of the features of installed distributions."""
    if faults := feature_findings():
        raise InputError(map(in_words, faults))


def refuse_faulty_modules(kind: str) -> None:
    """Raises InputError where the module of a kind of an installed feature has a fault."""
    if faults := [fault for package in features.installed_packages() for fault in examined(package, kind)[1]]:
        raise InputError(map(in_words, faults))


def in_words(fault: Finding) -> str:
    """Returns a fault of features as a line."""
    return f"{fault.message}. To fix: {fault.remedy}"


def clash(what: str, name: str, first: FeaturePackage, second: FeaturePackage) -> Finding:
    """Returns the fault of a name that two packages take."""
    others = [each.distribution for each in (first, second) if each.distribution]
    uninstall = " or ".join(f"`pip uninstall {each}`" for each in others)
    problem = f"the {what} {name!r} is of {first} and of {second}"
    return Finding((), problem, f"{uninstall}, or ask the author of {others[-1]} for another name")


def _clashes(kinds: list[str]) -> Iterator[Finding]:
    """Yields the names that an installed feature and another one, or Ringmaster, take."""
    hooks = [hook for kind in kinds for hook in HOOKS[kind].values()]
    taken = {(what, name): OWN for hook in hooks for name in hook.core() for what in hook.of}
    for kind in kinds:
        for list_name, hook in HOOKS[kind].items():
            for package, module in features.modules_by_package(kind).items():
                entries = hook.entries(getattr(module, list_name)) if hasattr(module, list_name) else []
                for what, name in ((what, name) for entry in entries for name in hook.names(entry) for what in hook.of):
                    other = taken.setdefault((what, name), package)
                    if other != package and (other.distribution or package.distribution):
                        yield clash(what, name, other, package)


def _entry_point_clashes() -> Iterator[Finding]:
    """Yields the names of techniques, losses and the like that two distributions have, or one and Ringmaster."""
    for path in OF_PACKAGES.values():
        registry = resolve(path)
        taken = {name: FeaturePackage(each) for name, each in registry.builtin.items()}
        for entry in installed_entries(registry.entry_point_group):
            package = FeaturePackage(entry.value, entry.distribution)
            if (other := taken.setdefault(entry.name, package)) != package:
                yield clash(registry.kind, entry.name, other, package)
