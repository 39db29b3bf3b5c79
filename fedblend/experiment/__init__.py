"""An experiment file as typed, validated data: fields, presets, studies, and what a run is set up with."""
