"""Plans for problems with further rules: order of jobs, releases, deadlines, host memory."""
