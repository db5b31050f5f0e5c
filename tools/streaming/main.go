// Command streaming-client is the client side of exec, attach and port-forward, over
// the client-go library, for tests of streaming servers.
//
//	streaming-client exec    [FLAGS] URL             as kubectl exec: its own stdin, stdout and stderr
//	streaming-client forward [-via spdy|websocket] URL PORT…  listens on loopback until its stdin ends
//
// The exit code of exec is the process's; 99 is an error of the client, which
// is on stderr behind "client: ".
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/client-go/util/exec"
)

// sizes of a terminal, each used once.
type sizes []remotecommand.TerminalSize

// Next returns nil when there are no more.
func (s *sizes) Next() *remotecommand.TerminalSize {
	if len(*s) == 0 {
		return nil
	}
	next := (*s)[0]
	*s = (*s)[1:]
	return &next
}

func parseSizes(text string) (*sizes, error) {
	all := &sizes{}
	for _, one := range strings.Fields(text) {
		var size remotecommand.TerminalSize
		if _, err := fmt.Sscanf(one, "%dx%d", &size.Width, &size.Height); err != nil {
			return nil, fmt.Errorf("invalid size %q: %w", one, err)
		}
		*all = append(*all, size)
	}
	return all, nil
}

func executor(via, address string, protocols []string) (remotecommand.Executor, error) {
	config := &rest.Config{Host: address}
	if via == "websocket" {
		if len(protocols) == 0 {
			return remotecommand.NewWebSocketExecutor(config, http.MethodGet, address)
		}
		return remotecommand.NewWebSocketExecutorForProtocols(config, http.MethodGet, address, protocols...)
	}
	target, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	if len(protocols) == 0 {
		return remotecommand.NewSPDYExecutor(config, http.MethodPost, target)
	}
	transport, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		return nil, err
	}
	return remotecommand.NewSPDYExecutorForProtocols(transport, upgrader, http.MethodPost, target, protocols...)
}

func runExec(args []string) error {
	flags := flag.NewFlagSet("exec", flag.ExitOnError)
	via := flags.String("via", "spdy", "spdy or websocket")
	protocols := flags.String("protocols", "", "versions to offer, instead of the library's")
	stdin := flags.Bool("stdin", false, "pass stdin")
	stdout := flags.Bool("stdout", true, "pass stdout")
	stderr := flags.Bool("stderr", true, "pass stderr")
	tty := flags.Bool("tty", false, "with a terminal")
	resize := flags.String("sizes", "", "sizes of the terminal, such as \"80x24 100x40\"")
	if err := flags.Parse(args); err != nil {
		return err
	}
	executor, err := executor(*via, flags.Arg(0), strings.Fields(*protocols))
	if err != nil {
		return err
	}
	options := remotecommand.StreamOptions{Tty: *tty}
	if *stdin {
		options.Stdin = os.Stdin
	}
	if *stdout {
		options.Stdout = os.Stdout
	}
	if *stderr && !*tty {
		options.Stderr = os.Stderr
	}
	if *tty {
		queue, err := parseSizes(*resize)
		if err != nil {
			return err
		}
		options.TerminalSizeQueue = queue
	}
	return executor.StreamWithContext(context.Background(), options)
}

func runForward(args []string) error {
	flags := flag.NewFlagSet("forward", flag.ExitOnError)
	via := flags.String("via", "spdy", "spdy or websocket")
	if err := flags.Parse(args); err != nil {
		return err
	}
	target, err := url.Parse(flags.Arg(0))
	if err != nil {
		return err
	}
	config := &rest.Config{Host: flags.Arg(0)}
	dialer, err := portforward.NewSPDYOverWebsocketDialer(target, config)
	if *via == "spdy" {
		transport, upgrader, failed := spdy.RoundTripperFor(config)
		if failed != nil {
			return failed
		}
		dialer, err = spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, target), nil
	}
	if err != nil {
		return err
	}
	stop := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(stop)
	}()
	addresses := []string{"127.0.0.1"}
	forwarder, err := portforward.NewOnAddresses(
		dialer, addresses, flags.Args()[1:], stop, make(chan struct{}), os.Stdout, os.Stderr)
	if err != nil {
		return err
	}
	return forwarder.ForwardPorts()
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("usage: streaming-client exec|forward FLAGS URL")
	}
	switch args[0] {
	case "exec":
		return runExec(args[1:])
	case "forward":
		return runForward(args[1:])
	}
	return fmt.Errorf("unknown command %q", args[0])
}

func main() {
	err := run(os.Args[1:])
	var exit exec.CodeExitError
	if errors.As(err, &exit) {
		os.Exit(exit.Code)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "client:", err)
		os.Exit(99)
	}
}
