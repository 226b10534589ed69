"""Methods that learn from pairs of answers: DPO and its kin, ORPO, SimPO."""
