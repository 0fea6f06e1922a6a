"""Finds the best plan by a search, or makes it again from what an earlier start of the run chose.

    Wanted --digest--> plan-KEY.json --PlanChoice--> one walk, one simulation, the proof
                       no such file  -> search -> the choice is written for the next start

The key is a digest of all that decides: graphs, budget, rates, seconds of tasks, homes, and our own
source text. A plan from a file passes the same proof as one that was searched, even where the user
has switched the proof off.
"""

import logging

from offload.caching.machine import our_version
from offload.caching.plan_cache import PlanCache
from offload.errors import OffloadError
from offload.planning.search import best_plan
from offload.planning.verify import verify
from offload.planning.wanted import FoundPlan, PlanChoice, Wanted

log = logging.getLogger(__name__)

KIND = "plan"


def proved_plan(wanted: Wanted, cache: PlanCache | None, proven: bool) -> FoundPlan:
    """The best plan. `proven`: verify it although it was searched just now."""
    key = () if cache is None else (our_version(), wanted.digest())
    if cache is not None and (data := cache.read(KIND, key)) is not None:
        try:
            plan = best_plan(wanted, PlanChoice.of_data(data))
            verify(plan.memgraph)
            log.info("a plan of %d tasks comes from %s", len(wanted.graph.tasks), cache.folder)
            return plan
        except (ValueError, OffloadError) as error:
            cache.refuse(KIND, key, f"{type(error).__name__}: {error}")
    plan = best_plan(wanted)
    if proven:
        verify(plan.memgraph)  # our mistakes must not become wrong bits of the user's
    if cache is not None and plan.choice is not None:
        cache.write(KIND, key, plan.choice.as_data())
    return plan
