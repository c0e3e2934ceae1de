"""What belongs to the RL loop on the side of the service: jobs, the trajectory log, grading (report, 6)."""
