"""The contract table: every family in every layout, mask, dtype, derivative and transform, against the reference."""
