"""Policies for the length of a draft."""

from .base import SCHEDULES, Controller
from .fixed import FixedController

__all__ = ["SCHEDULES", "Controller", "FixedController"]
