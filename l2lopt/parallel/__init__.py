"""Several threads, processes and jobs at once, with results that do not depend on how many."""
