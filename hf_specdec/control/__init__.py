"""Policies for the size of drafts."""

from .adaptive import Adaptive, AdaptiveController, ControlMemory
from .base import SCHEDULES, Controller, Schedule, Scope, as_schedule
from .cost import CostModel, load_costs, machine_key, read_costs, save_costs
from .fixed import Constant, FixedController

__all__ = [
    "SCHEDULES",
    "Adaptive",
    "AdaptiveController",
    "Constant",
    "ControlMemory",
    "Controller",
    "CostModel",
    "FixedController",
    "Schedule",
    "Scope",
    "as_schedule",
    "load_costs",
    "machine_key",
    "read_costs",
    "save_costs",
]
