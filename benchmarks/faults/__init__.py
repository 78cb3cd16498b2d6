"""Faults while training: does every run go on, and as if nothing had happened?"""
