"""The kernels that GPUs with sparse tensor cores offer an FFN, behind one interface."""
