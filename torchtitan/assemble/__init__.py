"""What `build.py` calls and no room holds yet: it unpacks the job's settings."""
