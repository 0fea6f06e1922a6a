"""The jobs that all train (gpt_jobs), and Ray Tune, which a fleet is compared with (ray_tune)."""
