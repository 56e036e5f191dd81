"""The servers of one host: slots, leases, supervisors and the permits that they grant.

One Snakemake process owns one fleet. Its supervisors and engines end with it, however it ends.
"""
