"""Uploads and downloads: jobs with their data to the scheduler, models back."""
