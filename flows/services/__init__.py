"""The servers of a pool and the processes beside them: which there are, how they are kept up and told apart."""
