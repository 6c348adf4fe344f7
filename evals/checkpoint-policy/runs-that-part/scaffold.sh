#!/usr/bin/env bash
# Copy the repository of the case into the working directory.
cp -R "$(dirname "$0")/fixture/." .
