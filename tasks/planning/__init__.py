"""Which technique, on how many devices, when and where: one joint problem, solved with a certificate."""
