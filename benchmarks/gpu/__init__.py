"""Twelve minutes on one GPU: what only CUDA and NCCL can show, part by part."""
