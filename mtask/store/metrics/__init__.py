"""Operations of metrics: tallies of workers, totals of dead workers, counts of tasks that all readers share."""
