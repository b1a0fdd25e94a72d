"""A step model that is fitted to made-up but exact step times, and what is played over it."""

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.surface import Scenario
from sarathi_tune.measure.profile import Profile, Sample
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.stepmodel.fit import StepModel, fit_step_model
from sarathi_tune.workload.load import load_workload


def step_ms(shape: Shape) -> float:
    """20 ms plus 1 ms per token: about a small model on two cores."""
    return 20.0 + shape.num_tokens


def exact_model() -> StepModel:
    """A model of `step_ms`."""
    shapes = [Shape(decodes, context) for decodes in (1, 2, 4, 8, 16, 32) for context in (128, 1024)]
    shapes += [Shape(0, 0, chunk, prefix) for chunk in (16, 64, 128, 512, 1024, 2048) for prefix in (0, 1024)]
    shapes += [Shape(8, 512, chunk, prefix) for chunk in (56, 120, 504, 1016) for prefix in (0, 512)]
    return fit_step_model(Profile(tuple(Sample(shape, (step_ms(shape),) * 5) for shape in shapes)))


def scene(model: StepModel, workload: str = "fixed:384:33") -> Scenario:
    """Requests over that model, for an objective of 100 ms."""
    config = EngineConfig(token_budget=1, max_num_seqs=32, num_pages=4096, max_model_len=2048)
    return Scenario(model, config, load_workload(workload).fit_to_context(2048), Slo(100.0), num_requests=80)
