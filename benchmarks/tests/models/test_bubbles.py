from benchmarks.models.bubbles import Shape, step_units


def test_a_step_takes_what_the_schedule_says_and_overlap_hides_its_bubble() -> None:
    shape = Shape(stages=2, microbatches=4, whole=True)
    assert shape.bubble == 0.2
    # Two units for each microbatch that the step waits for, and one for the optimizer.
    assert 11.0 <= step_units(shape, 0) < 11.5
    assert 9.0 <= step_units(shape, 2) < 10.0


def test_where_backwards_are_split_only_the_first_forward_keeps_the_last_stage_waiting() -> None:
    assert 10.0 <= step_units(Shape(stages=2, microbatches=4), 0) < 10.5
