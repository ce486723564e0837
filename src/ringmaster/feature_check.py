"""The check of all features before anything starts: what is wrong with those of installed distributions.

No feature replaces another one silently, nor anything of Ringmaster. Built-in features are checked by the tests.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from types import ModuleType

from ringmaster import features
from ringmaster.errors import InputError
from ringmaster.feature_hooks import (
    HOOKS,
    OF_PACKAGES,
    OF_PROCESSES,
    HookList,
    examined,
    layout_faults,
    remedy_for,
    uninstall,
)
from ringmaster.features import BUILTIN, ENTRY_POINT_GROUP, FeaturePackage
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
    return tuple(dict.fromkeys([*_packages_named_twice(), *faults, *_clashes(kinds), *_entry_point_clashes()]))


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
    problem, either = f"the {what} {name!r} is of {first} and of {second}", " or ".join(map(uninstall, others))
    return Finding((), problem, f"{either}, or ask the author of {others[-1]} for another name")


def _clashes(kinds: list[str]) -> Iterator[Finding]:
    """Yields the names that an installed feature and another one, or Ringmaster, take."""
    hooks = [hook for kind in kinds for hook in HOOKS[kind].values()]
    taken = {(what, name): OWN for hook in hooks for name in hook.core() for what in hook.of}
    for kind in kinds:
        for list_name, hook in HOOKS[kind].items():
            for package, module in features.modules_by_package(kind).items():
                names, faults = _names(hook, module, list_name, package=package)
                yield from faults
                for name, what in product(names, hook.of):
                    other = taken.setdefault((what, name), package)
                    if other != package and (other.distribution or package.distribution):
                        yield clash(what, name, other, package)


def _names(
    hook: HookList, module: ModuleType, list_name: str, *, package: FeaturePackage
) -> tuple[list[str], list[Finding]]:
    """Returns the names that the entries of a list take, and the entries of which none can be read."""
    names, faults = list[str](), list[Finding]()
    for entry in hook.entries(getattr(module, list_name)) if hasattr(module, list_name) else []:
        try:
            names += hook.names(entry)
        except Exception as error:
            if not package.distribution:
                raise
            problem = f"{module.__name__}: {list_name} cannot be used: {type(error).__name__}: {error}"
            faults.append(Finding((), problem, remedy_for(package)))
    return names, faults


def _packages_named_twice() -> Iterator[Finding]:
    """Yields the packages of features that two distributions name, or one and Ringmaster."""
    taken = dict.fromkeys(BUILTIN, OWN.name)
    for each in installed_entries(ENTRY_POINT_GROUP):
        if (other := taken.setdefault(each.value, each.distribution)) != each.distribution:
            problem = f"the feature {each.value} is named by two distributions: {other} and {each.distribution}"
            yield Finding((), problem, uninstall(each.distribution))


def _entry_point_clashes() -> Iterator[Finding]:
    """Yields the names of techniques, losses and the like that two distributions have, or one and Ringmaster."""
    for path in OF_PACKAGES.values():
        registry = resolve(path)
        taken = {name: FeaturePackage(each) for name, each in registry.builtin.items()}
        for entry in installed_entries(registry.entry_point_group):
            package = FeaturePackage(entry.value, entry.distribution)
            if (other := taken.setdefault(entry.name, package)) != package:
                yield clash(registry.kind, entry.name, other, package)
