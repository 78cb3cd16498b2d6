"""Rows or stages divided by speed between unequal ranks, against every other division."""
