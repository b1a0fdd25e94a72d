"""The order in which requests get tokens in a step: one file per policy, all over the same queue."""

from sarathi_tune.config.engine import SchedulerName
from sarathi_tune.engine.schedulers.base import Scheduler
from sarathi_tune.engine.schedulers.decode_first import DecodeFirstScheduler
from sarathi_tune.engine.schedulers.orca import OrcaScheduler
from sarathi_tune.engine.schedulers.prefill_first import PrefillFirstScheduler
from sarathi_tune.engine.schedulers.sarathi import SarathiScheduler
from sarathi_tune.engine.schedulers.sarathi_single import SarathiSingleScheduler

SCHEDULERS: dict[SchedulerName, type[Scheduler]] = {
    "sarathi": SarathiScheduler,
    "sarathi-single": SarathiSingleScheduler,
    "prefill-first": PrefillFirstScheduler,
    "decode-first": DecodeFirstScheduler,
    "orca": OrcaScheduler,
}
