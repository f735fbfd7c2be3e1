"""Environments: tasks, and what answers to a policy's answers, in one turn or several with tools."""
