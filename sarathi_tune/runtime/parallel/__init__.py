"""One model over several processes: rank 0 schedules, all ranks compute the same slices."""
