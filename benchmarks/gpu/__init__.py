"""Checks of one GPU: what only CUDA and NCCL can show, part by part."""
