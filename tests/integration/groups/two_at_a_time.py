"""`ringmaster` with a memory limit of two adapters at a time, and with fixed fast profiles.

Plans then do not depend on how busy the machine is.
"""

from ringmaster.tasks.profiling import group_layouts, group_search
from ringmaster.tasks.profiling.group_search import GroupScaling


class _Quick(GroupScaling):
    def profile(self, *args, **options):
        return super().profile(*args, **options).at_pace(1e-3)


def _all_in_one(members, **_):
    return [members]


if __name__ == "__main__":
    scaling_of = group_search.scaling_of
    group_search.scaling_of = lambda *args, **options: _Quick(**vars(scaling_of(*args, **options)))
    group_layouts.candidate_groups = _all_in_one
    group_search.GroupSearch._num_that_fit = lambda self, group: min(2, len(group))

    from ringmaster.flows.entry import main

    main()
