"""Lower bounds on the largest of factor x end over jobs, where a value v is a due date v / factor for each job."""
