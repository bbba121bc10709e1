"""Measure draft strategies on a model: acceptance, wall clock, quality and losslessness.

`run_bench` measures, `verify` checks, `plan_strategy` chooses, `plan`, `plan_tree` and `plan_layers` forecast;
`expected_tokens`, `compute_speedup` and `find_optimal_length` are the formulas.
"""

from .bench import run_bench
from .config import RunConfig
from .cost import CostCurve, measure_costs
from .layer_plan import LayerPlan, plan_layers
from .length_plan import load_run, plan
from .lossless import Verdict, verify
from .planning import compute_speedup, expected_tokens, find_optimal_length
from .strategy_plan import StrategyPlan, plan_strategy
from .task import Sample, Task, load_samples, load_task, task_names
from .tree_plan import measure_acceptance, plan_tree

__all__ = [
    "CostCurve",
    "LayerPlan",
    "RunConfig",
    "Sample",
    "StrategyPlan",
    "Task",
    "Verdict",
    "compute_speedup",
    "expected_tokens",
    "find_optimal_length",
    "load_run",
    "load_samples",
    "load_task",
    "measure_acceptance",
    "measure_costs",
    "plan",
    "plan_layers",
    "plan_strategy",
    "plan_tree",
    "run_bench",
    "task_names",
    "verify",
]
