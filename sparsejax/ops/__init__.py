"""The operations whose GEMMs can run on sparse tensor cores."""
