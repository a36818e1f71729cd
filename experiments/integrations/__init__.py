"""Scripts that train models of other libraries with their FFNs sparse."""
