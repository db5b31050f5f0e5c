//! Probes of a running container, and the consequences of their failure.

use crate::members::ContainerHistory;
use crate::observed::ContainerView;
use crate::plan_builder::PlanBuilder;
use crate::probe::{self, ProbeKind, ProbeVerdict};
use crate::step::{Step, Target};
use crate::time::{add, seconds};

impl<'a> PlanBuilder<'a> {
    pub(super) fn probes(&mut self, m: &ContainerHistory<'a>, view: &'a ContainerView) {
        for kind in [ProbeKind::Startup, ProbeKind::Liveness] {
            let declared = kind.of(&m.declared.container);
            let state = self.o.memory.probes.get(&(view.id.clone(), kind));
            if let (Some(declared), Some(state)) =
                (declared, state.filter(|s| s.verdict == ProbeVerdict::Failed))
            {
                let grace = declared.termination_grace_period_seconds.map_or_else(|| self.grace(), seconds);
                let why = format!("{} probe failed", kind.name().to_lowercase());
                return self.stop(m, view, add(state.changed_at, grace), &why);
            }
        }
        let started = m.is_started(&self.o);
        for kind in ProbeKind::ALL {
            // The startup probe runs until the startup is complete; the others run from then on.
            if (kind == ProbeKind::Startup) != started {
                self.check(m, view, kind);
            }
        }
    }

    fn check(&mut self, m: &ContainerHistory<'a>, view: &'a ContainerView, kind: ProbeKind) {
        let Some(declared) = kind.of(&m.declared.container) else { return };
        let timing = probe::timing(declared);
        let state = self.o.memory.probes.get(&(view.id.clone(), kind));
        let began = view.started_at.unwrap_or(view.created_at);
        let Some(due) = probe::due_at(kind, &timing, state, began) else { return };
        if !self.is_free(&Target::Probe(view.id.clone(), kind)) {
            return;
        }
        if due > self.o.now {
            return self.wake_at(due);
        }
        let check = probe::check(declared, &m.declared.container, &self.address());
        let (id, name) = (view.id.clone(), m.name().to_owned());
        self.step(Step::Probe { id, name, kind, check, limit: timing.limit });
    }
}
