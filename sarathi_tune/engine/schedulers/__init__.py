"""The order in which requests get tokens in a step: one file per policy, all over the same queue."""

from sarathi_tune.config.engine import SchedulerName
from sarathi_tune.engine.schedulers.base import Scheduler
from sarathi_tune.engine.schedulers.sarathi import SarathiScheduler

SCHEDULERS: dict[SchedulerName, type[Scheduler]] = {"sarathi": SarathiScheduler}
